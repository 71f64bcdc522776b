"""Planned steps inside Megatron Core's training loop. Unlike the readers, they need torch and Megatron Core."""
