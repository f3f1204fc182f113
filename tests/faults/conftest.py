import pytest

from tests.faults.hub_job import Job


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()
