"""Batches and samples: datasets, reading ahead, digests of batches."""
