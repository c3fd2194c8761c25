"""Python imports this as it starts: processes that tests start have the simulated device as well."""

from simulated_gpu.device import install

install()
