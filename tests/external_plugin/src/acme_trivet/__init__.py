"""Plugins for Trivet: a scheduler and a watermark."""
