# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="ko"
# # 13장. 이미지가 들어오면: 비전-언어 모델
#
# 2B 모델을 4비트로 읽었는데도 이미지를 넣으면 죽고([unsloth #1326](https://github.com/unslothai/unsloth/issues/1326)), 80 GB 카드 여덟 장에서도 죽는다([Qwen3-VL #1150](https://github.com/QwenLM/Qwen3-VL/issues/1150)). **이미지 한 장은 메모리를 얼마나 쓰고, 무엇을 줄이면 되는가?**
#
# 이 장은 비전-언어 모델(vision-language model, VLM) 가운데 작은 Qwen3-VL-2B를 LoRA로 한 스텝 학습하는 프로그램을 가상 GPU에서 실행해 센다. 모델의 코드는 transformers 5.23의 것이고 고치지 않았다. 가중치는 4 GiB쯤이다. LoRA는 옵티마이저 상태가 작아서 첫 스텝과 둘째 스텝의 최대가 거의 같으므로 한 스텝만 센다.
#
# 이 장의 학습 프로그램을 진짜 카드에서 잰 것은 없다. 남이 잰 것과 비교하는 것은 13.5절의 비전 인코더뿐이다.
#
# 이 장을 마치면 다음을 할 수 있다.
#
# - 이미지의 크기를 보고 토큰의 수를 말한다.
# - OOM 메시지의 수를 보고 로짓과 점수 행렬을 알아낸다.
# - 1,200만 픽셀 이미지 한 장을 T4 한 장에서 학습한다.
#
# <details><summary>지금 OOM이 났다면: 무엇부터 바꾸나</summary>
#
# | traceback에 있는 함수 | 무엇이 큰가 | 절 | 먼저 해 볼 것 |
# |---|---|---|---|
# | `fixed_cross_entropy`, `ForCausalLMLoss`. 또는 `backward`에서 토큰 × 어휘 크기의 요청 | 이미지 토큰의 로짓까지 만든다 | 13.3 | 내 루프라면 `logits_to_keep`, `Trainer`라면 `use_liger_kernel=True` |
# | `sdpa_attention_forward` (T4) | 그룹 쿼리의 점수 행렬 | 13.3, 3.12 | `sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False` |
# | 층의 `forward` | 순전파 상태 | 13.2 | 체크포인팅(`model.train()` 뒤에만 듣는다). 비전 인코더에는 LoRA를 붙이지 않는다 |
# | 비전 인코더의 어텐션(`VisionSdpaAttention`) | 옛 transformers의 점수 행렬(4.50까지)이나 마스크(4.53까지) | 13.5 | transformers를 올린다 |
# | 그래도 죽는다 | 이미지 토큰의 수 | 13.1 | 프로세서의 `max_pixels`를 낮춘다 |
#
# 그대로 베낄 루프는 13.7절에 있다.
#
# </details>

# %%
from functools import partial

import torch

from helpers import case, exercise, guess, guesses, human_bytes, images_panel
from helpers.chapters.c11_outside.tried import compare
from helpers.chapters.c13_images.tokens import grid_of
from helpers.chapters.c13_images.towers import draw_towers, towers_of_each
from helpers.chapters.c13_images.trained import train

torch.set_num_threads(1)

# %% [markdown] lang="ko"
# ## 13.1 사진 한 장은 몇 토큰인가
#
# 이미지는 한 번 잘리고 한 번 묶인다. 먼저 16 × 16픽셀의 **패치**(patch)로 잘려 **비전 인코더**(vision encoder)로 들어간다. 그 출력을 2 × 2개씩 묶은 것이 **이미지 토큰**이다. 이미지 토큰은 글의 토큰과 나란히 언어 모델로 들어간다. 그래서 토큰 하나는 32 × 32픽셀이다.
#
# 휴대폰 사진 한 장(4,032 × 3,024픽셀)은 몇 토큰일까?

# %%
photo = (4032, 3024)
tokens_of_photo = guess("13.1", None, "tokens")
tokens_of_photo

# %% [markdown] lang="ko"
# `grid_of`는 transformers의 이미지 프로세서가 쓰는 `smart_resize`를 불러 가로와 세로를 32의 배수로 맞춘 다음 센다.

# %%
tokens_of_photo.against(grid_of(*photo).tokens)

# %% [markdown] lang="ko"
# 흔히 쓰는 크기마다 패치와 토큰을 적는다. 화면(screen), 300 dpi로 스캔한 A4(A4 scan), 휴대폰 사진(phone photo)이다.

# %%
sizes = {
    "512 × 512": (512, 512), "1024 × 1024": (1024, 1024), "screen 1920 × 1080": (1920, 1080),
    "A4 scan 300 dpi": (2480, 3508), "phone photo": photo,
}  # fmt: skip
for name, size in sizes.items():
    grid = grid_of(*size)
    print(f"{name:<18} {grid.patches:7,} patches {grid.tokens:6,} tokens")

# %% [markdown] lang="ko"
# 휴대폰 사진 한 장이 11,844토큰이다. 3장부터 길이 512나 2,048로 세어 온 글보다 훨씬 길다. **이미지를 넣는 것은 긴 글을 넣는 것이다.** 그래서 이 장의 처방은 대부분 긴 글의 처방이다.
#
# 프로세서에는 한도가 있다. 이미지가 `max_pixels`를 넘으면 비율을 지키며 줄인다. 그런데 모델과 함께 배포된 설정의 한도(`preprocessor_config.json`의 `size`에 있는 `longest_edge`. 이름과 달리 변이 아니라 픽셀의 수다)는 16,777,216픽셀(16,384토큰)이라, 1,200만 픽셀인 휴대폰 사진은 줄지 않는다. 한도를 1,280토큰, 256토큰으로 낮추어 본다. 한도와 토큰의 수다.

# %%
for most in (16_777_216, 1280 * 32 * 32, 256 * 32 * 32):
    print(f"{most:10,} {grid_of(*photo, most).tokens:6,}")

# %% [markdown] lang="ko"
# 변을 32의 배수로 내리므로 한도를 다 채우지는 못한다. 내 스크립트에서는 프로세서를 읽을 때 적는다(`processor(…)`를 부를 때 적는 방법은 없어진다).
#
# ```python
# processor = AutoProcessor.from_pretrained("Qwen/Qwen3-VL-2B-Instruct", max_pixels=1280 * 32 * 32)
# ```
#
# 글자를 읽어야 하는 문서라면 줄인 이미지에서도 글자가 보이는지 눈으로 확인한다. `grid = grid_of(*image.size, 1280 * 32 * 32)`이면 `image.resize((grid.across * 16, grid.down * 16))`이 모델이 보는 크기다.
#
# Qwen2-VL과 Qwen2.5-VL의 패치는 14 × 14라서, 토큰 하나가 28 × 28픽셀이다. 크기와 상관없이 토큰의 수가 정해진 모델도 있다. LLaVA-1.5는 576개, Gemma 3는 256개다. transformers의 설정에서 읽는다.

# %%
from transformers import Gemma3Config, LlavaConfig

LlavaConfig().image_seq_length, Gemma3Config().mm_tokens_per_image

# %% [markdown] lang="ko"
# **연습 13-1.** 샘플 하나에 이미지가 `images`장이고, 이미지 토큰이 모두 `tokens`개까지다(이미지의 앞뒤를 알리는 토큰은 세지 않는다). 프로세서에 적을 가장 큰 `max_pixels`를 돌려주는 함수를 써라(Qwen3-VL). 막히면 `exercise("13-1").hint()`, 그래도 막히면 `exercise("13-1").solution()`을 실행한다.


# %%
def max_pixels_for(tokens, images):
    return ...


exercise("13-1").check(max_pixels_for)

# %% [markdown] lang="ko"
# ## 13.2 비전 인코더는 얼마나 쓰는가
#
# > **주장 1.** "비전 인코더에까지 LoRA를 붙이면 메모리가 8~16배 든다" ([theneuralbase](https://theneuralbase.com/lora-qlora/learn/advanced/qwen2-vl-lora-fine-tuning/))
#
# 프로그램의 뼈대다. 전체 코드는 `helpers/chapters/c13_images/trained.py`에 있다. 가중치는 16비트이고, 샘플은 이미지와 그 뒤의 글 64토큰이다. 값은 메모리를 바꾸지 않으므로 가중치는 파일에서 읽지 않고 설정만으로 만들었고, 픽셀은 0으로 채웠다.
#
# ```python
# model = Qwen3VLForConditionalGeneration.from_pretrained("Qwen/Qwen3-VL-2B-Instruct", dtype=dtype).cuda()
# model = get_peft_model(model, LoraConfig(r=16, target_modules=targets)).train()
# with torch.autocast("cuda", dtype):
#     loss = model(**batch).loss      # input_ids, pixel_values, image_grid_thw, labels …
# loss.backward()                     # fp16이면 GradScaler를 거친다(1장)
# optimizer.step()
# ```
#
# `targets`는 둘이다. `language`는 언어 모델의 모든 선형층(`r".*language_model.*_proj"`)에, `all`은 비전 인코더의 선형층에까지(PEFT의 `"all-linear"`) 어댑터를 붙인다. 비전 인코더의 파라미터는 4억 개로 전체의 19%다. 1024 × 1024 이미지 한 장을 L4(24 GB)에서 학습할 때, `all`의 최대는 `language`의 몇 배일까?

# %%
both_towers = guess("13.2", None, "times")
both_towers

# %% [markdown] lang="ko"
# 막대 하나는 한 프로그램의 메모리가 **최대인 순간**이고, 칸 안의 수는 GiB다. 이미지가 512 × 512인 것과 1024 × 1024인 것이고, 마지막 막대는 1024 × 1024의 `all`에 체크포인팅을 켠 것이다.

# %%
half = {"dtype": torch.bfloat16}
bars = towers_of_each(
    {
        "512, language": partial(train, 512, 512, **half),
        "512, all": partial(train, 512, 512, adapters="all", **half),
        "1024, language": partial(train, 1024, 1024, **half),
        "1024, all": partial(train, 1024, 1024, adapters="all", **half),
        "all, checkpointing": partial(train, 1024, 1024, adapters="all", checkpointing=True, **half),
    },
    "L4",
)
draw_towers(bars)

# %% [markdown] lang="ko"
# 예상과 비교한다. 512 × 512일 때의 배수도 적는다. 그 아래는 1024 × 1024의 `all`에서 순전파 상태만 나눈 것(두 쪽을 더한 것이 언어 모델의 몇 배인가)이고, 체크포인팅이 없을 때와 있을 때다.

# %%
at_most = [one.total for one in bars.values()]
print(f"{at_most[1] / at_most[0]:.2f}")
for name in ("1024, all", "all, checkpointing"):
    held = bars[name].held
    print(f"{1 + held['vision activations'] / held['language activations']:.1f}")
both_towers.against(at_most[3] / at_most[2])

# %% [markdown] lang="ko"
# 세 가지가 보인다.
#
# - **어댑터가 없는 비전 인코더는 순전파 상태를 남기지 않는다.** `language`의 막대에는 노란 칸이 없다. 역전파할 것이 없으니 남길 것도 없다. 그때 비전 인코더는 가중치만큼만 든다.
# - **어댑터를 붙이면 언어 모델보다 많이 남긴다.** 파라미터는 언어 모델의 4분의 1인데 남긴 것은 더 많다. 비전 인코더는 토큰이 아니라 패치를 보고, 패치는 토큰의 네 배이기 때문이다. 폭이 절반(1,024와 2,048)이고 층도 적어(24와 28) 네 배가 아니라 1.2배(4.11 / 3.37)에 그친다. 같은 모델이라면 순전파 상태는 **지나가는 패치나 토큰의 수**에 비례한다.
# - **체크포인팅은 두 쪽에 다 듣는다.** 층마다 입력만 남으므로 노란 칸과 분홍색 칸이 함께 줄고, 로짓만 크게 남는다.
#
# <details><summary>주장 1의 판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **여기서는 틀리다.** 전체는 1.45배다. 이미지가 커지면 배수도 커진다(512에서 1.19, 1024에서 1.45). 가중치는 그대로이고 순전파 상태와 로짓만 늘기 때문이다. 그래도 체크포인팅이 없을 때의 순전파 상태끼리 나눈 2.2배를 넘지 못한다. 체크포인팅을 켜면 그 비는 3.8배로 커지지만, 더 드는 것은 0.4 GiB가 되지 않는다. 주장은 4비트로 읽은 Qwen2-VL-7B를 두고 한 말이고 무엇을 나눈 것인지 밝히지 않았다. 여기서 센 것은 16비트 2B다. 배수보다 중요한 것은 크기다. 비전 인코더까지 학습할 까닭이 없으면 `target_modules`를 언어 모델로 좁힌다. `"all-linear"`는 비전 인코더에까지 붙인다.
#
# </details>
#
# **바꾸어 본다.** 막대를 그린 셀에서 `train(...)`의 1024를 모두 768로 바꾸고, 다음 셀까지 다시 실행한다. `all`의 배수는 1.19와 1.45 사이의 어디쯤인가? (확인한 다음에는 1024로 되돌린다.)
#
# <details><summary>답</summary>
#
# 9.51 / 7.12, 1.34배다.
#
# </details>
#
# ## 13.3 휴대폰 사진 한 장, T4 한 장
#
# 이제 사진을 줄이지 않고 T4에 올린다(쓸 수 있는 메모리는 14.64 GiB다). 어댑터는 언어 모델에만 있고, 비전 인코더는 아무것도 남기지 않는다. 그대로 들어갈까? 아니면 차례로 **몇 가지**를 고쳐야 할까?

# %%
on_t4 = guess("13.3", None, ("0", "1", "2", "3", "nothing helps"))
on_t4

# %% [markdown] lang="ko"
# 한 줄에 하나씩 더한다. `text only`는 글의 로짓만 만드는 것이고, 아래에서 설명한다. '결과'는 요청한 텐서의 크기와 요청한 함수다. OOM인 줄의 'GPU 최대'는 죽기 전까지의 최대라서 그 요청은 들어 있지 않다.

# %%
tried = {
    "as it is": partial(train, *photo),
    "+ repeat_kv": partial(train, *photo, repeat_kv=True),
    "+ checkpointing": partial(train, *photo, repeat_kv=True, checkpointing=True),
    "+ text only": partial(train, *photo, repeat_kv=True, checkpointing=True, answer_only=True),
}
compare(tried, "T4", ram=False)

# %% [markdown] lang="ko"
# 예상과 비교한다.

# %%
on_t4.against("3")

# %% [markdown] lang="ko"
# 고칠 때마다 다른 것이 넘쳤다. 첫 줄과 셋째 줄의 크기를 셈해 본다. 토큰은 이미지의 11,844개에 이미지의 앞뒤를 알리는 2개와 글 64개를 더한 11,910개다.

# %%
tokens = grid_of(*photo).tokens + 2 + 64
print(human_bytes(16 * tokens * tokens * 4), human_bytes(tokens * 151_936 * 4))

# %% [markdown] lang="ko"
# - **8.45 GiB는 점수 행렬**이다. 헤드 16개 × 토큰 × 토큰 × fp32다(메시지에는 할당자가 2 MiB 단위로 올린 8.46 GiB로 나온다). 3.12절의 함정 그대로다. 샘플이 하나라 패딩이 없고, Qwen3-VL은 그룹 쿼리이며, T4에는 flash가 없다. 3.12절의 한 줄로 사라진다.
# - **139.57 MiB**는 층 하나의 MLP가 쓰려던 것이다(11,910 × 폭 6,144 × 2바이트). 작은 요청에서 죽었으니 카드가 이미 찬 것이고(10.1절), 채운 것은 순전파 상태다. 14.64에서 14.10을 뺀 0.54 GiB가 남은 듯하지만, 대부분 캐시 속의 조각이라 이 요청에 쓰이지 못했다(10.5절). 체크포인팅으로 줄인다.
# - **6.74 GiB는 로짓**이다. 토큰 × 어휘 151,936개 × fp32다. 그런데 이미지 토큰에는 정답이 없다. 라벨을 −100으로 두어 손실에서 빼므로, 11,910토큰의 로짓을 만들어 64토큰의 것만 쓴 것이다.
#
# 셋 가운데 하나만 빼도 죽는다. 표를 만든 셀의 마지막 줄에서 `repeat_kv=True`만, 또는 `checkpointing=True`만 지워 확인한다.
#
# 첫째를 고치는 줄은 모델을 부르기 전에, 셋째를 고치는 `logits_to_keep`은 부를 때 적는다. 라벨이 처음 나오는 자리를 찾아, 그 앞의 하나부터만 로짓을 만든다. `labels`도 같은 길이로 자른다.
#
# ```python
# from transformers.integrations import sdpa_attention
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False         # T4
#
# labels = batch.pop("labels")                                          # CPU에 있을 때
# first = int((labels != -100).any(0).nonzero()[0])                     # 배치에서 라벨이 처음 나오는 자리
# kept = labels.shape[1] - first + 1
# loss = model(**batch, logits_to_keep=kept, labels=labels[:, -kept:]).loss
# ```
#
# 내가 쓴 collator라면 이미지와 질문의 자리에 −100을 스스로 적어야 한다(13.7절). `labels`가 `input_ids`를 베낀 그대로면 첫 라벨이 맨 앞이라 아무것도 줄지 않는다. 줄어드는 것은 첫 라벨 앞의 로짓뿐이므로, 이미지와 질문이 앞에, 답이 뒤에 있는 샘플이라야 효과가 있다. 손실은 같은가? 같은 종류의 작은 모델로 두 손실을 계산한다.

# %%
from helpers.chapters.c13_images.loss import both_losses

[round(loss, 3) for loss in both_losses()]

# %% [markdown] lang="ko"
# 같다. 어떤 도구를 쓰느냐에 따라 할 일이 다르다.
#
# - **내가 쓴 루프**: 위의 줄을 적는다.
# - **`Trainer`**: 로짓을 통째로 만든다(3.11절). `use_liger_kernel=True`를 켠다(Liger의 커널은 가상 GPU가 따라가지 못해 이 장에서 세지 않았다).
# - **TRL 1.16의 `SFTTrainer`**: 그대로 둔다. 라벨이 있는 토큰만 골라 로짓을 조각으로 계산한다. 대신 `SFTConfig(max_length=None)`을 적는다. 기본값은 1,024토큰에서 자르므로, 이 장의 사진이면 이미지 토큰이 잘려 오류로 멈춘다.
#
# 같은 사진이 L4(24 GB)에서는 어떤지 본다. 이 카드에는 flash가 있어 점수 행렬이 없다.

# %%
on_l4 = {
    "checkpointing": partial(train, *photo, checkpointing=True, **half),
    "+ text only": partial(train, *photo, checkpointing=True, answer_only=True, **half),
}
compare(on_l4, "L4", ram=False)

# %% [markdown] lang="ko"
# 24 GB에서도 로짓 때문에 죽고, 글의 로짓만 만들면 T4에서와 거의 같은 크기로 끝난다. **이미지를 줄이기 전에, 쓰지 않을 로짓부터 만들지 않는다.** 그래도 모자라면 `max_pixels`를 낮춘다.
#
# ## 13.4 여러 장과 동영상
#
# 이미지가 여러 장이면 토큰을 더한다. 1024 × 1024 네 장과 2048 × 2048 한 장은 토큰의 수가 같다. 메모리도 같을까? 비전 인코더는 이미지마다 따로 어텐션을 계산한다.

# %%
same = {
    "1024² × 4": partial(train, 1024, 1024, 4, checkpointing=True, repeat_kv=True),
    "2048² × 1": partial(train, 2048, 2048, 1, checkpointing=True, repeat_kv=True),
}
compare(same, "T4", ram=False)

# %% [markdown] lang="ko"
# 여섯 토큰만큼만 다르다(이미지의 앞뒤를 알리는 토큰 세 쌍이다). 융합 커널은 점수 행렬을 만들지 않으니, 몇 장으로 나뉘었는지는 메모리에 나타나지 않는다(시간은 다르다). **토큰의 합**만 센다.
#
# 동영상은 프레임을 둘씩 묶은 것이 이미지 한 장이다. 다만 한도(`size`의 `longest_edge`)가 프레임 하나가 아니라 **프레임 전체의 합**에 걸린다(transformers의 `video_processing_qwen3_vl.py`). 그래서 길이를 늘리면 토큰이 한도까지 늘다가, 그다음부터는 프레임이 작아진다. 줄일 때는 초당 프레임 수(`fps`)와 한도 가운데 무엇을 잃을지 고르는 것이다.
#
# ### 사건 13-A: 샘플 하나에 사진 네 장
#
# 휴대폰 사진 네 장과 글 64토큰이 샘플 하나인 데이터를 T4(14.64 GiB)에서 학습한다(체크포인팅과 `repeat_kv`를 켰다. 로짓은 통째로 만든다). 사진을 줄이지 않으면 죽는다. **들어가는 것 가운데 가장 큰 `max_pixels`**를 65,536(64토큰)의 배수로 찾아라. 실험은 다섯 번까지다. `case("13-A").run(max_pixels=...)`로 실험하고, 찾은 값을 아래 셀의 `None` 자리에 적는다. 두 번 실험하면 직선을 그을 수 있다. 가로축은 `max_pixels`가 아니라 `grid_of(*photo, max_pixels).tokens`다. 한도를 얼마나 채우는지가 값마다 다르기 때문이다.

# %%
case("13-A").check(None)

# %% [markdown] lang="ko"
# ## 13.5 남들이 잰 것: 마스크와 차원
#
# > **주장 2.** "비전 인코더에는 flash_attention_2가 꼭 있어야 한다. sdpa로는 OOM이 난다" ([Qwen3-VL #541](https://github.com/QwenLM/Qwen3-VL/issues/541), [unsloth #1390](https://github.com/unslothai/unsloth/issues/1390))
#
# Qwen2.5-VL-7B의 모델 전체를 올려 두고 비전 인코더에만 이미지를 하나 넣어, 그레이디언트 없이 순전파만 해서 A100에서 잰 값이 공개되어 있다([transformers #37363](https://github.com/huggingface/transformers/pull/37363)). 같은 일을 하는 프로그램을 당시의 transformers(4.50.3)로 가상 GPU에서 미리 실행해 두었다. 잰 것과 나란히 놓는다.

# %%
from helpers.chapters.c13_images.others import measured_tower

measured_tower()

# %% [markdown] lang="ko"
# 실행한 두 줄은 0.003% 안에서 맞는다. `without masks`의 두 줄은 그 수정이 그대로 들어간 버전이 없어서, `flash`는 flash_attn의 RoPE(위치를 넣는 연산) 커널을 가상 GPU가 따라가지 못해서 실행하지 않았다.
#
# <details><summary>밝혀지지 않은 것</summary>
#
# 이 표의 출처는 이미지가 1000 × 2530이라고 하고, 같은 사람이 같은 날 거의 같은 값을 적은 [Qwen3-VL #1049](https://github.com/QwenLM/Qwen3-VL/issues/1049)는 1000 × 2350이라고 한다. 뒤의 것으로 실행했다. 앞의 것이면 패치가 72 × 180 = 12,960개라 점수 행렬이 1.15배이고, eager의 최대가 8.6% 많다. 라이브러리의 버전도 적혀 있지 않다. 4.51부터는 sdpa가 flash와 비슷하므로(아래) 그보다 앞이다. 그러니 맞은 것은 규칙이지, 밝혀지지 않은 설정까지 맞힌 것은 아니다.
#
# </details>
#
# 가중치(83억 × 2바이트)가 15.45 GiB이니 sdpa와 eager는 20 GiB 넘게, flash는 0.5 GiB쯤 더 쓴 것이다. 무엇이 20 GiB일까? 1000 × 2350은 28의 배수로 맞추면 1008 × 2352이고, 14픽셀의 패치로 72 × 168 = 12,096개다. 어텐션 하나만 떼어 네 가지로 불러 본다. 헤드는 16개, 헤드 하나는 80차원이다. `3-D`는 텐서가 3차원, `4-D`는 앞에 배치 차원이 하나 더 있는 것이다.


# %%
import torch.nn.functional as F


def attend(dimensions, mask=None, patches=12_096):
    shape = {3: (16, patches, 80), 4: (1, 16, patches, 80)}[dimensions]
    with torch.no_grad():
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        if mask is not None:
            mask = torch.ones(mask, dtype=torch.bool, device="cuda")
        F.scaled_dot_product_attention(q, k, v, mask)


square = (1, 12_096, 12_096)
compare(
    {
        "3-D, mask": partial(attend, 3, square),
        "3-D": partial(attend, 3),
        "4-D, mask": partial(attend, 4, square),
        "4-D": partial(attend, 4),
    },
    "A100-80GB",
    ram=False,
)

# %% [markdown] lang="ko"
# **차원 하나가 20 GiB다.** PyTorch의 융합 커널은 (배치, 헤드, 길이, 차원)의 4차원만 받는다. 배치 차원이 없으면 경고 없이 `math`로 가서 점수 행렬을 만든다. 16 × 12,096 × 12,096 × fp32가 8.7 GiB다. 점수와 확률이 함께 있는 순간이 있어 그 두 배이고, 가려진 줄을 찾는 1바이트짜리 배열(`_safe_softmax`) 2.2 GiB가 더 있다. 옛 코드는 패치를 한 줄로 이어 배치 차원 없이 불렀고, 4.51에서 `unsqueeze(0)`을 넣어 고쳤다.
#
# 마스크가 더한 것은 20.36 − 19.95 = 0.41 GiB다. bool 12,096²바이트와 그것을 bf16으로 바꾼 사본이고, 위의 표에서 **잰** 차이(sdpa 36.06 − 35.65)와 같다. 4차원이어도 마스크를 만들면 이만큼이 길이 × 길이로 는다. 이미지 여러 장의 패치를 한 줄로 잇고 마스크로 가르던 4.53까지의 방식이 그렇다. 이미지가 네 장이면 마스크는 한 장일 때의 열여섯 배다. 그 뒤의 transformers는 이미지마다(Qwen2.5-VL은 이미지를 나눈 8 × 8패치의 창마다) 잘라서 마스크 없이 부른다(13.4절에서 몇 장인지가 메모리에 나타나지 않은 까닭이다).
#
# | transformers | 비전 인코더의 sdpa (Qwen2.5-VL) |
# |---|---|
# | 4.50까지 | 3차원: `math`, 점수 행렬 |
# | 4.51~4.53 | 4차원과 마스크: 융합 커널, 길이 × 길이의 마스크 |
# | 4.54부터 | 이미지(창)마다 4차원, 마스크 없음 |
#
# (4.49.0, 4.50.3, 4.51.0, 4.52.4, 4.53.3, 4.54.1, 5.23.0의 `modeling_qwen2_5_vl.py`를 읽어 확인했다.)
#
# <details><summary>주장 2의 판정 (맞다, 조건부로 맞다, 틀리다 가운데 하나를 먼저 고른다)</summary>
#
# **조건부로 맞다.** 4.50까지는 점수 행렬, 4.53까지는 마스크 때문에 그럴 수 있었다. 4.54부터는 둘 다 없으므로, flash_attn을 쓸 수 없는 T4에서도 점수 행렬이 없다. 오래된 글의 처방이 어느 버전의 것인지부터 본다.
#
# </details>
#
# **연습 13-2.** unsloth #1390의 메시지는 Qwen2-VL의 비전 인코더(헤드 16개)에서 `Tried to allocate 272.00 GiB`였다. `math` 커널의 fp32 점수 행렬이라면, 한 줄로 이은 패치가 몇 개였을까? 정수로 적는다. 그 점수 행렬의 크기가 272 GiB와 0.5% 안에서 맞으면 된다.

# %%
patches = None
exercise("13-2").check(patches)

# %% [markdown] lang="ko"
# ## 13.6 직접 바꿔 보기
#
# 이미지, 장수, 카드, 방법을 고르고 **실행**을 누른다. 스텝 하나를 실제로 실행하므로 몇 초가 걸린다. 죽으면 그 순간에 있던 것과 들어주지 못한 요청을 그린다. T4에서 A4 스캔 두 장을 학습하려면 무엇을 켜야 하는가?
#
# <details><summary>답</summary>
#
# 셋(체크포인팅, 글의 로짓만, `repeat_kv`)을 다 켜야 9.19 GiB로 들어간다.
#
# </details>

# %%
images_panel()

# %% [markdown] lang="ko"
# ## 13.7 내 프로그램이라면
#
# T4 한 장에서 쓸 프로그램이다. `collate`는 이미지와 질문의 라벨을 −100으로 가린다. 답까지의 토큰에서 질문까지의 토큰을 빼면 답의 자리가 남는다. `model.train()`을 빠뜨리지 않는다. `from_pretrained`는 평가 모드로 돌려주고, **평가 모드에서는 체크포인팅이 조용히 꺼진다.** 13.3절의 네 번째 줄에 `max_pixels`를 더한 것이고, `max_pixels`는 들어가는 데까지 높인다. Qwen3-VL의 프로세서에는 torchvision이 필요하다(Colab에는 있다).
#
# ```python
# import torch
# from peft import LoraConfig, get_peft_model
# from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
# from transformers.integrations import sdpa_attention
#
# sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
# name = "Qwen/Qwen3-VL-2B-Instruct"
# processor = AutoProcessor.from_pretrained(name, max_pixels=1280 * 32 * 32)
#
# def collate(samples):      # 샘플 하나씩: {"image": PIL 이미지, "question": "…", "answer": "…"}
#     (sample,) = samples
#     picture = {"type": "image", "image": sample["image"]}
#     question = {"type": "text", "text": sample["question"]}
#     user = {"role": "user", "content": [picture, question]}
#     answer = {"role": "assistant", "content": [{"type": "text", "text": sample["answer"]}]}
#     how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
#     asked = processor.apply_chat_template([user], add_generation_prompt=True, **how)
#     batch = processor.apply_chat_template([user, answer], **how)
#     labels = batch["input_ids"].clone()
#     labels[:, : asked["input_ids"].shape[1]] = -100
#     return {**batch, "labels": labels}
#
# loader = torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=collate)
# model = Qwen3VLForConditionalGeneration.from_pretrained(name, dtype=torch.float16).cuda()
# model = get_peft_model(model, LoraConfig(r=16, target_modules=r".*language_model.*_proj"))
# model.gradient_checkpointing_enable()
# model.enable_input_require_grads()
# model.train()
# optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
# scaler = torch.amp.GradScaler("cuda")
# for batch in loader:
#     labels = batch.pop("labels")
#     kept = labels.shape[1] - int((labels != -100).any(0).nonzero()[0]) + 1
#     batch = {key: tensor.cuda() for key, tensor in batch.items()}
#     batch |= {"logits_to_keep": kept, "labels": labels[:, -kept:].cuda()}
#     with torch.autocast("cuda", torch.float16):
#         loss = model(**batch, use_cache=False).loss
#     scaler.scale(loss).backward()
#     scaler.step(optimizer)
#     scaler.update()
#     optimizer.zero_grad()
# ```
#
# 9장의 플래너(`virtual-gpu fit`)는 글만 안다. 이미지가 있는 프로그램은 그대로 실행해서 센다(설치하는 법은 [9장의 첫머리](09_fit_your_gpu.ipynb)).
#
# ```bash
# virtual-gpu --language ko run --gpu T4 --steps 2 train.py --batch_size 1
# ```
#
# '모듈별'(by module)에서 `visual`이 얼마인지, '프로그램의 줄별'(by line)에서 손실의 줄이 얼마인지 본다. 이미지의 크기는 데이터마다 다르니 **토큰이 가장 많은 배치**로 두 스텝을 돌려 본다(10.3절). 샘플마다 이미지가 `images`라는 목록에 있다면 이렇게 찾는다(`grid_of`는 이 강의의 저장소에서 불러온다).
#
# ```python
# from helpers.chapters.c13_images.tokens import grid_of
#
# def tokens(sample, max_pixels=16_777_216):
#     return sum(grid_of(*image.size, max_pixels).tokens for image in sample["images"])
#
# largest = max(range(len(dataset)), key=lambda i: tokens(dataset[i]))
# ```
#
# ## 13.8 기억할 것
#
# 이 장에서 적은 예상과 결과를 돌아본다.

# %%
guesses()

# %% [markdown] lang="ko"
# - 이미지 한 장은 글로 치면 수백에서 만여 토큰이다. `max_pixels`가 그 수를 정한다.
# - 비전 인코더는 학습하지 않으면 가중치만큼만 든다. 학습하면 토큰의 네 배인 패치가 순전파 상태를 남긴다.
# - 이미지 토큰에는 정답이 없다. 내가 쓴 루프라면 `logits_to_keep`, `Trainer`라면 `use_liger_kernel=True`로 로짓을 통째로 만들지 않는다.
# - T4에서는 `use_gqa_in_sdpa`를 끄는 한 줄을 먼저 적는다.
# - 체크포인팅은 `model.train()` 뒤에만 듣는다.
# - 점수 행렬이 보이면 flash_attn을 찾기 전에 transformers의 버전을 본다.
#
# | 방법 | 줄어드는 것 | 대가 |
# |---|---|---|
# | `max_pixels` | 모두 | 작은 글자가 뭉개진다 |
# | 비전 인코더에 LoRA를 붙이지 않기 | 비전 인코더의 순전파 상태 | 비전 인코더는 그대로다 |
# | 체크포인팅(`model.train()`과 함께) | 두 쪽의 순전파 상태 | 순전파를 한 번 더 계산한다 |
# | `logits_to_keep` | 이미지 토큰의 로짓 | 없다 |
# | `use_gqa_in_sdpa`를 끄기(`repeat_kv`, T4) | 점수 행렬 | 키와 값의 사본 |
#
# ## 13.9 더 읽을거리
#
# - 이미지의 크기를 그대로 두고 토큰의 수를 바꾸는 방식: Wang 외, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution", 2024, [arXiv:2409.12191](https://arxiv.org/abs/2409.12191)
# - 이 장의 모델: "Qwen3-VL Technical Report", 2025, [arXiv:2511.21631](https://arxiv.org/abs/2511.21631)
# - 이미지 토큰의 정답이 없다는 것: transformers의 [Qwen3-VL 문서](https://huggingface.co/docs/transformers/model_doc/qwen3_vl)
