"""What people see of plans and runs: tables, traces, pages."""
