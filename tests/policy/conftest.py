from tests.export.conftest import one_thread, qwen, tokenizer_dir  # noqa: F401  (fixtures)
