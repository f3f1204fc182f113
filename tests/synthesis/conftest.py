"""Tracing and tiny products are fastest in one thread and without the records that torch writes for pytest's log."""

import logging

import torch

torch.set_num_threads(1)
logging.getLogger("torch.__trace").disabled = True
