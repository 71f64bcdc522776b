"""From a caption to a video of a moving digit: an example of Pipeloom."""
