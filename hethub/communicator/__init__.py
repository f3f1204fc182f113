"""One process group over accelerators of several makers."""
