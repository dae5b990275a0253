"""Configuration, sampling parameters, requests and outputs as pydantic models."""
