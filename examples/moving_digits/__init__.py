"""Example: a text-to-video model that generates moving digits from captions."""
