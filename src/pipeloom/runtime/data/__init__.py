"""Batches and samples: data sets, reading ahead, digests of contents."""
