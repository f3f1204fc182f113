"""The device layer and the staging kernels: pack, cast, add and quantise, the same result on every maker's device."""
