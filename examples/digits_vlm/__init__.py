"""Example: a vision-language model that reads handwritten digits in documents."""
