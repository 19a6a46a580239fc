"""Stages compiled by torch's inductor, region by region."""
