"""Plans of strategy hap as files: a program, operator by operator, and its table by module.

Start reading: plan_file.py.
May import: spec.accelerator, spec.base, spec.cluster, spec.documents, spec.errors, spec.job, spec.model.
"""

from hethub.spec.program.plan_file import (
    AxisSpec,
    Items,
    OperatorSpec,
    ProgramFor,
    ProgramPlanSpec,
    ProgramSpec,
    is_for_cluster,
    is_program_plan,
    load_program_plan,
    program_plan_text,
    save_program_plan,
)
from hethub.spec.program.prediction import memory_limits, prediction_of
from hethub.spec.program.requests import check_plannable
from hethub.spec.program.table import module_rows, modules_json, program_notes, program_table, show_ratios

__all__ = [
    "AxisSpec",
    "Items",
    "OperatorSpec",
    "ProgramFor",
    "ProgramPlanSpec",
    "ProgramSpec",
    "check_plannable",
    "is_for_cluster",
    "is_program_plan",
    "load_program_plan",
    "memory_limits",
    "module_rows",
    "modules_json",
    "prediction_of",
    "program_notes",
    "program_plan_text",
    "program_table",
    "save_program_plan",
    "show_ratios",
]
