"""One folder or tar that brings a service to a machine without network."""
