import logging

import pytest


@pytest.fixture(autouse=True)
def logs_again():
    """A benchmark turns the logs of its process off."""
    yield
    logging.disable(logging.NOTSET)
