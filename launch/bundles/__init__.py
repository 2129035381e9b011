"""Pack and unpack bundles for an air-gapped site, for launch/airgap.py.

The package cannot be called `airgap`, since launch/airgap.py is the module of that name.
"""
