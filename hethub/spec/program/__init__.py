"""Plans of strategy hap as files: a program, operator by operator, and its table by module.

Start reading: plan_file.py.
May import: spec.accelerator, spec.base, spec.cluster, spec.documents, spec.errors, spec.model.
"""

from hethub.spec.program.plan_file import (
    AxisSpec,
    OperatorSpec,
    ProgramPlanSpec,
    ProgramSpec,
    is_program_plan,
    load_program_plan,
    program_plan_text,
    save_program_plan,
)
from hethub.spec.program.table import modules_json, program_notes, program_table, show_ratios

__all__ = [
    "AxisSpec",
    "OperatorSpec",
    "ProgramPlanSpec",
    "ProgramSpec",
    "is_program_plan",
    "load_program_plan",
    "modules_json",
    "program_notes",
    "program_plan_text",
    "program_table",
    "save_program_plan",
    "show_ratios",
]
