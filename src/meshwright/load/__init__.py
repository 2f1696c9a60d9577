"""A load test of a server with OpenAI's API, and its simulation for a planned server.

traffic      requests and their arrivals: lengths and chats, drawn from a seed
words        texts of a given number of tokens, for an unknown tokenizer
client       one request, streamed, with the arrival time of each token
drive        all requests: open loop, closed loop, chats turn by turn
percentiles  percentiles, throughput and goodput of the answers
simulator    answers of a planned server
"""
