"""lm_eval's command line with the model quire, for its releases without plugins."""

from lm_eval.__main__ import cli_evaluate

import quire.integrations.lm_eval  # noqa: F401  # registers the model

if __name__ == "__main__":
    cli_evaluate()
