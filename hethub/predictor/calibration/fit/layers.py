"""The first part of the fit: rooflines and scales from measured layer times."""

from collections.abc import Iterable

import numpy as np

from hethub.predictor.calibration.fit.least_squares import Parameter, attention_scales, common, scales, solve
from hethub.predictor.calibration.sources.layer_times import LayerRow, LayerTable
from hethub.predictor.calibration.sources.products import ProductRow, log_errors
from hethub.predictor.cost.constants import Constants, architecture, scales_key

ROOFLINE = [
    common("vector_matmul", 0.95, 0.1, upper=1.0),
    common("matrix_matmul", 0.9, 0.1, upper=1.0),
    common("vector_traffic", 0.015, 0.5),
    common("matrix_traffic", 0.003, 0.5),
    common("vector_attention", 0.3, 0.1, upper=1.0),
    common("matrix_attention", 0.45, 0.1, upper=1.0),
    common("passes", 1.3, 0.2),
    common("backward_fp32", 1.0, 0.1),
    common("backward_fp16", 1.0, 0.1),
    common("gradient_bytes", 12.0, 0.5),
    common("kernel_seconds", 4e-6, 0.3),
    common("launch_seconds", 1e-5, 0.3),
    common("narrow", 40.0, 0.5),
    common("burst_seconds", 0.1, 1.0),
    common("wave_area", 3e5, 0.7),
    common("misaligned", 0.1, 0.5),
]


def layer_parameters(rows: Iterable[LayerRow]) -> list[Parameter]:
    """Every number that the rows can tell."""
    rows = list(rows)
    architectures = sorted({scales_key(architecture(row.accelerator), row.precision) for row in rows})
    accelerators = sorted({scales_key(row.accelerator.name, row.precision) for row in rows})
    by_architecture = [*scales("architectures", architectures, 0.06, 0.1), *attention_scales(architectures, 0.2)]
    return [*ROOFLINE, *by_architecture, *scales("accelerators", accelerators, 0.06, 0.3)]


def fit_layers(base: Constants, rows: list[LayerRow], products: list[ProductRow]) -> Constants:
    """The constants that price the rows and measured products best; residuals are logarithms."""
    table = LayerTable.of(rows)
    parameters = [*layer_parameters(rows), *product_parameters(products)]

    def residuals(constants: Constants) -> np.ndarray:
        layers = np.log(table.predict(constants) / table.measured).ravel()
        return np.concatenate([layers, log_errors(products, constants)])

    return solve(base, parameters, residuals, f_scale=0.1)


def product_parameters(products: list[ProductRow]) -> list[Parameter]:
    """What of its peak each accelerator's products reach, and narrower ones relative to half precision's."""
    names = sorted({f"{row.accelerator.name} fp16" for row in products})
    found = [Parameter("accelerators", key, "log_matmul", 0.0, 0.3, False) for key in names]
    return [*found, common("fp8_matmul", 0.95, 0.1)] if found else []
