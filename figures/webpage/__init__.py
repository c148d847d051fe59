"""`make report`: one HTML page, whole in itself, that shows all records. It reads records only, never torch.

`data` chooses what is said of each model, `tokens` what the token view shows, `images` draws the figures small, `page`
puts them into the template under assets/.
"""
