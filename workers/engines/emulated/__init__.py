"""The emulated engine: OpenAI-compatible workers whose compute is a cost model.

Text is made up (deterministic), time is simulated, but HTTP, errors, the pool client and failures
are real. Every answer says so: header `x-perilune-emulated: true`, model metadata `emulated`.
"""
