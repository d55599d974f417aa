from tests.support.processes import PRELOADED, context

context.set_forkserver_preload([*PRELOADED, "tests.huggingface.models"])  # transformers, in seconds
