"""How long a step takes and how much memory it needs, for any plan on any cluster, with or without the hardware.

Start reading: predict.py, then memory/ranks.py.
May import: spec.
"""

from hethub.predictor.cost.layer import LayerCost
from hethub.predictor.memory.ranks import RankMemory, check_memory, rank_memory
from hethub.predictor.predict import Prediction, predict

__all__ = ["LayerCost", "Prediction", "RankMemory", "check_memory", "predict", "rank_memory"]
