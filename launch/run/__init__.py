"""Setup of a run from its configuration: data, pipeline, folder, resuming, auto-tuning."""
