"""hethub: one training job over accelerators of several makers."""

__version__ = "0.1.0"
