"""Advice before the first start, from config.json alone: what fits under a VRAM cap and what speed to expect."""

SPECULATIVE_CONFIG = '{"method":"subspec"}'
