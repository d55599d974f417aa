"""What will happen in a run, as plain data: partition, schedule, messages and transport."""

from petra.plan.plan import Plan, StagePlan, make_plan

__all__ = ["Plan", "StagePlan", "make_plan"]
