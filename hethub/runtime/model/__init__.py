"""The Llama on one rank's shards: layers, loss, initial values, Hugging Face folders.

Start reading: stage.py, then layers.py.
May import: kernels, spec, runtime.pace, runtime.state.
"""
