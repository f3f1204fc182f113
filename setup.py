"""Everything about the package is declared in pyproject.toml; this file keeps `python setup.py`-era tools working."""

from setuptools import setup

setup()
