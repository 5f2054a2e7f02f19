"""The MultiModalInference resource: its types, defaults, validation and CRD."""
