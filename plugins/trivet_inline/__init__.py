"""Executor that runs the worker in the process of the engine."""
