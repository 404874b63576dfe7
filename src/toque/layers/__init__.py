"""The parts that models are made of: small frozen classes that hold weights and call Ops."""
