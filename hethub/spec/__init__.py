"""What everybody speaks: validated, frozen descriptions and the pure arithmetic on them. Never imports torch.

Start reading: plan.py, then layout/bind.py.
May import: nothing of ours.
"""
