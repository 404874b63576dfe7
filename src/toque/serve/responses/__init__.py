"""`/v1/responses`: another spelling of the one conversation and the one form of an answer."""
