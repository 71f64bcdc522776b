"""Ready-made data sets: WebDataset shards, Parquet files and folders of the `datasets` library, with a processor of the
`transformers` library.

What a processor gives for a sample is asked of the processor itself, in two halves. Its text half runs with an image
processor that knows images by their sizes alone: on every rank, for every sample. Its image half runs on the images
that a rank's layers take. So nothing of a processor is written anew, and what both halves say is compared.
"""
