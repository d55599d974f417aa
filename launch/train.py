"""Train a model: ``petra train ...`` in one process, ``petra train --nproc N ...`` in N."""

from __future__ import annotations

from .runtime.terminal import command


@command
def main() -> None:
    """Run each configuration on the command line, which Hydra parses.

    Modules are imported as late as possible: an invalid value is reported before torch is imported, and Ctrl-C works meanwhile.
    """
    from .config.compose import training_configs
    from .runtime.rank import Process
    from .runtime.reporting import only_first_prints, report_errors
    from .runtime.signals import stop_with_agent

    process = Process.from_environment()
    stop_with_agent()
    with report_errors(process):
        with only_first_prints(process):
            configs = training_configs()
        if not configs:
            return
        import torch

        from .elastic.run import run

        torch.set_num_interop_threads(1)
        for config in configs:
            run(config, process)


if __name__ == "__main__":
    main()
