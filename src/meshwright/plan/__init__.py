"""The search for a layout, with what explains and checks it.

The package can be called: `meshwright.plan("llama-3-8b", "v5e:4x4", work)`; see `api.plan`.
"""
