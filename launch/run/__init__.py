"""From a configuration to a run: data, pipeline, folder, resuming, auto-tuning."""
