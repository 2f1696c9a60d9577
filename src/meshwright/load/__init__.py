"""A load test of any server that speaks OpenAI's API.

traffic    what is asked and when: lengths, arrivals, chats, from a seed
words      texts of so many tokens, whatever the server's tokenizer
client     one request, streamed, each token's arrival timed
drive      the whole traffic: open loop, closed loop, chats turn by turn
summary    percentiles, throughput and goodput of what came back
"""
