"""What is found in the bytes of a message without a parser, by Python or by the native build."""
