"""Plans: what will happen in a run (partition, schedule, messages and transport), as plain data."""

from petra.plan.plan import Plan, StagePlan, make_plan

__all__ = ["Plan", "StagePlan", "make_plan"]
