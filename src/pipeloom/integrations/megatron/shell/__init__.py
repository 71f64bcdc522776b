"""What a bash script would start, found without running it."""
