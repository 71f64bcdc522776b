"""Reading handwritten digits in documents: an example of Pipeloom."""
