"""Pack and unpack bundles for an air-gapped site, for launch/airgap.py.

The package has another name than its front door, since launch/airgap.py is a module of that name.
"""
