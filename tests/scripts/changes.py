"""Changes that make each script of `posted` one of many ranks: lines and what stands in their place, beside `import autopar`.

A replacement is (the lines as posted, the lines instead); lines of the script that do nothing any more (`zero_grad`, `step` and
clipping where there are no gradients) stay.
"""

from __future__ import annotations

Replacement = tuple[str, str]

CHANGES: dict[str, tuple[Replacement, ...]] = {
    "nano_gpt": (
        (
            "for iter_num in range",
            'step = autopar.parallelize(model, "here", (X, Y), optimizer=optimizer, clip_grad_norm=grad_clip)\nfor iter_num in range',
        ),
        ("    logits, loss = model(X, Y)\n", "    loss = step(X, Y)\n"),
        ("    loss.backward()\n", ""),
    ),
    "min_gpt": (
        (
            "losses = []\n",
            'losses = []\nx = y = torch.zeros(8, 2 * length - 1, dtype=torch.long)\n'
            'step = autopar.parallelize(model, "here", (x, y), optimizer=optimizer, clip_grad_norm=1.0)\n',
        ),
        ("    logits, loss = model(x, y)\n", "    loss = step(x, y)\n"),
        ("    loss.backward()\n", ""),
    ),
    "micrograd": (
        (
            "losses, accuracies = [], []\n",
            'losses, accuracies = [], []\nstep = autopar.parallelize(model, "here", (X, y), loss_fn=loss_fn, optimizer=optimizer)\n',
        ),
        ("    total_loss, acc = loss_fn(model(X), y)\n", "    total_loss, acc = step(X, y)\n"),
        ("    total_loss.backward()\n", ""),
    ),
    "dcgan": (
        (
            'print("Starting Training Loop...")\n',
            'print("Starting Training Loop...")\n'
            'step = autopar.parallelize(gan, "here", (noise,), optimizer=optimizerG, entries={"critic": autopar.Entry('
            "(noise, dataset[0]), module=gan, train=True, optimizer=optimizerD)})\n",
        ),
        ("    errD = gan(noise, real_cpu)\n    errD.backward()\n", '    errD = step.entry("critic")(noise, real_cpu)\n'),
        ("    errG = gan(noise)\n    errG.backward()\n", "    errG = step(noise)\n"),
    ),
    "vae": (
        (
            "train_loss = 0\n",
            "train_loss = 0\nloss_fn = lambda out, x: loss_function(out[0], x, *out[1:])\n"
            'step = autopar.parallelize(model, "here", (train_data[0][0],) * 2, loss_fn=loss_fn, optimizer=optimizer)\n',
        ),
        (
            "    recon_batch, mu, logvar = model(data)\n    loss = loss_function(recon_batch, data, mu, logvar)\n"
            "    loss.backward()\n",
            "    loss = step(data, data)\n",
        ),
    ),
    "simclr": (
        (
            "for n_iter in",
            'step = autopar.parallelize(model, "here", (images,), loss_fn=info_nce_loss, optimizer=optimizer)\nfor n_iter in',
        ),
        ("    loss = info_nce_loss(model(images))\n", "    loss = step(images)\n"),
        ("    loss.backward()\n", ""),
    ),
    "ddpm": (
        (
            "losses = []\n",
            'losses = []\nstep = autopar.parallelize(diffusion, "here", (training_images[:8],), optimizer=optimizer)\n',
        ),
        ("    loss = diffusion(img.to(device))\n    loss.backward()\n", "    loss = step(img)\n"),
    ),
    "unet_attention": (
        (
            "losses = []\n",
            "losses = []\nbatch = (torch.zeros(8, 1, 8, 8), torch.arange(8), torch.zeros(8, 1, 8, 8))\n"
            'step = autopar.parallelize(model, "here", batch, loss_fn=F.smooth_l1_loss, optimizer=optimizer)\n',
        ),
        (
            "    loss = F.smooth_l1_loss(model(x_noisy, t), noise)\n    loss.backward()\n",
            "    loss = step(x_noisy, t, noise)\n",
        ),
    ),
    "dlrm": (
        (
            "for j in range(20):\n",
            'step = autopar.parallelize(dlrm, "here", (X, lS_o, lS_i, T), loss_fn=loss_fn, optimizer=optimizer)\n'
            "for j in range(20):\n",
        ),
        ("    Z = dlrm(X, lS_o, lS_i)\n    E = loss_fn(Z, T)\n", "    E = step(X, lS_o, lS_i, T)\n"),
        ("    E.backward()\n", ""),
    ),
    "lstm_language_model": (
        (
            "for batch, i in",
            "example = (get_batch(train_data, 0)[0], hidden, get_batch(train_data, 0)[1])\n"
            'step = autopar.parallelize(model, "here", example, loss_fn=lambda out, y: (criterion(out[0], y), out[1]), '
            "optimizer=optimizer, clip_grad_norm=0.25)\n"
            "for batch, i in",
        ),
        (
            "    output, hidden = model(data, hidden)\n    loss = criterion(output, targets)\n    loss.backward()\n",
            "    loss, hidden = step(data, hidden, targets)\n",
        ),
    ),
    "transformer_xl": (
        (
            "for batch in range(20):\n",
            "example, loss_fn = (stream[:tgt_len], stream[:tgt_len], *mems), lambda out: (out[0].mean(), out[1:])\n"
            'step = autopar.parallelize(model, "here", example, loss_fn=loss_fn, optimizer=optimizer, clip_grad_norm=0.25)\n'
            "for batch in range(20):\n",
        ),
        (
            "    ret = model(data, target, *mems)\n    loss, mems = ret[0], ret[1:]\n    loss = loss.mean().type_as(loss)\n"
            "    loss.backward()\n",
            "    loss, mems = step(data, target, *mems)\n",
        ),
    ),
    "byol": (
        (
            "losses = []\n",
            "losses = []\n"
            'step = autopar.parallelize(online, "here", (*[torch.zeros(8, 3, 8, 8)] * 2, *[torch.zeros(8, 16)] * 2), '
            "loss_fn=byol_loss, optimizer=opt)\n",
        ),
        (
            "    loss = byol_loss(online(image_one, image_two), target_proj_one, target_proj_two)\n    opt.zero_grad()\n"
            "    loss.backward()\n    opt.step()\n",
            "    loss = step(image_one, image_two, target_proj_one, target_proj_two)\n"
            "    online.load_state_dict(step.state_dict())\n",
        ),
    ),
    "ppo": (
        (
            "minibatch_size = num_steps // num_minibatches\n",
            "minibatch_size = num_steps // num_minibatches\n"
            "example = [b[:minibatch_size] for b in (b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values)]\n"
            'step = autopar.parallelize(agent, "here", tuple(example), loss_fn=ppo_loss, optimizer=optimizer, '
            "clip_grad_norm=max_grad_norm)\n",
        ),
        (
            "        loss, approx_kl = ppo_loss(agent(b_obs[mb_inds], b_actions.long()[mb_inds]), *mb)\n",
            "        loss, approx_kl = step(b_obs[mb_inds], b_actions[mb_inds], *mb)\n",
        ),
        ("        loss.backward()\n", ""),
    ),
    "grpo": (
        (
            "losses, kls = [], []\n",
            "losses, kls = [], []\nadvantages, logps, mask = score(ids)\n"
            'step = autopar.parallelize(model, "here", (ids, logps, logps, advantages, mask), loss_fn=grpo_loss, '
            "optimizer=optimizer)\n",
        ),
        (
            "    loss, kl = grpo_loss(model(ids), old_per_token_logps, ref_per_token_logps, advantages, completion_mask)\n",
            "    loss, kl = step(ids, old_per_token_logps, ref_per_token_logps, advantages, completion_mask)\n",
        ),
        ("    loss.backward()\n", ""),
    ),
    "dpo": (
        (
            "for example_counter",
            'step = autopar.parallelize(trainer, "here", batch, loss_fn=lambda out: out, optimizer=optimizer, '
            "clip_grad_norm=10.0)\nfor example_counter",
        ),
        ("    loss, margin = trainer(*batch)\n", "    loss, margin = step(*batch)\n"),
        ("    loss.backward()\n", ""),
    ),
    "lora": (
        (
            "losses = []\n",
            "losses = []\nexample, loss_fn = torch.zeros(2, 8, 12, dtype=torch.long), lambda out, y: criterion(out.transpose(1, 2), y)\n"
            'step = autopar.parallelize(model, "here", tuple(example), loss_fn=loss_fn, optimizer=optimizer)\n',
        ),
        ("    loss = criterion(model(inputs).transpose(1, 2), labels)\n    loss.backward()\n", "    loss = step(inputs, labels)\n"),
    ),
    "distillation": (
        (
            "running_loss = 0.0\n",
            "running_loss = 0.0\nx, y = train_loader[0]\n"
            'step = autopar.parallelize(student, "here", (x, y, teacher(x).detach()), loss_fn=kd_loss, optimizer=optimizer)\n',
        ),
        (
            "    loss = kd_loss(student(inputs), labels, teacher_logits)\n    loss.backward()\n",
            "    loss = step(inputs, labels, teacher_logits)\n",
        ),
    ),
    "multi_task": (
        (
            "for it in range",
            'step = autopar.parallelize(net, "here", (x, targets), loss_fn=multi_task_loss, optimizer=optimizer)\nfor it in range',
        ),
        ("    loss = multi_task_loss(net(x), targets)\n", "    loss = step(x, targets)\n"),
        ("    loss.backward()\n", ""),
    ),
    "mixture_density": (
        ("for i in range(20)", 'step = autopar.parallelize(model, "here", (x, y), optimizer=optimizer)\nfor i in range(20)'),
        ("    loss = model(x, y)\n    loss.backward()\n", "    loss = step(x, y)\n"),
    ),
    "neural_ode": (
        (
            "losses = []\n",
            "losses = []\nexample = (true_y[:batch_size], t[:batch_time], torch.zeros(batch_time, batch_size, 1, 2))\n"
            'step = autopar.parallelize(model, "here", example, loss_fn=lambda out, y: torch.mean(torch.abs(out - y)), '
            "optimizer=optimizer)\n",
        ),
        (
            "    pred_y = model(batch_y0, batch_t)\n    loss = torch.mean(torch.abs(pred_y - batch_y))\n    loss.backward()\n",
            "    loss = step(batch_y0, batch_t, batch_y)\n",
        ),
    ),
}  # fmt: skip
