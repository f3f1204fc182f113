"""How far predictions are off for families of sources that the fit has not seen, beside one utilisation per accelerator.

python benchmarks/accuracy.py [DATA]

Fits as `python -m hethub.predictor.calibration.fit` does, again and again without one family or source, and writes
nothing. DATA holds the measured tables (default ../shared/data). A few minutes of one core.
"""

import sys
from pathlib import Path

from hethub.predictor.calibration.fit.__main__ import fit_all

if __name__ == "__main__":
    fit_all(Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data"))
