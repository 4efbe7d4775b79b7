"""ONNX: the protobuf's fields by ranges, and the graph with its initializers."""
