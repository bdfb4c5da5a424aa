"""Training: one loop for pretraining and fine-tuning (report §2.5, §3.2, §3.3).

`loop`     the algorithm, top to bottom          `config`, `recipes`   what decides a run; TOML and back
`state`    what a checkpoint holds               `data`                what a run reads
`reduce`   every quantity of the global batch    `totals`              what micro-batches add up to
`balance`  routers' biases                       `spike`               which updates are applied
`evaluate` loss and bits per byte                `metrics`, `flops`    rows of numbers; MFU
`weights`  a trained model                       `progress`, `report`  what people see
"""
