"""Smaller for real: what closed slots save, compressed models, files, ONNX."""
