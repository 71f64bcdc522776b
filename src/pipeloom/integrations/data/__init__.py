"""Data sets from WebDataset shards, Parquet files and folders of the `datasets` library, with a processor of the
`transformers` library.

The processor itself makes the samples, in two halves. The text half runs on all ranks for all samples, with an image
processor that sees only image sizes. The image half runs only on the images that a rank's layers take. So no processor
is reimplemented, and the outputs of both halves are compared.
"""
